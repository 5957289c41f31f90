/* The theme searches in a worker, and a browser starts none for a page that it reads from a disk. There, a hidden frame
   runs the same script: what is posted to the worker reaches the frame's window, and what the script posts comes back. */

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => resolve(this.prepare(url))
      })
      document.body.appendChild(this.frame)
    }

    prepare(url) {
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(inside, next)), Promise.resolve())
      return load(inside, url).then(() => inside)
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }

  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = reject
      inside.document.body.appendChild(script)
    })
}
