"""Which process starts the job's store, its address, and the token that several hosts must share."""

import socket

import pytest
from torch.distributed.run import parse_args

from ntp_plugin.cli.main import main
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.job_store import address_to_listen_on, start_store, token_of

ANY = "a token of 25 characters."
TWO_HOSTS = ["--nnodes=2", "--rdzv-backend=c10d"]


def listening_at(words, log=None):
    """(the store's address, the arguments as torch gets them); None where it is not ours to start."""
    arguments = parse_args([*words, "train.py"])
    store = start_store(arguments, say=[].append if log is None else log.append)
    return (None if store is None else (store.host, store.port)), arguments


@pytest.mark.parametrize(
    ("words", "environment", "ours"),
    [
        (["--standalone"], {}, True),
        (["--nproc-per-node", "2", "--standalone"], {}, True),
        ([], {}, True),
        ([], {"PET_STANDALONE": "1"}, True),
        (["--standalon"], {}, True),
        (["--nnodes=2"], {}, False),
        (["--master-port=29500"], {}, False),
    ],
)
def test_a_job_of_one_host_gets_a_store_on_loopback(words, environment, ours, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found, arguments = listening_at([*words, "--rdzv-conf=timeout=7"])
    assert (found is not None) == ours
    if ours:
        assert found[0] == "127.0.0.1"
        assert arguments.rdzv_endpoint == f"127.0.0.1:{found[1]}"
        assert arguments.rdzv_conf == "timeout=7,is_host=0"
        assert arguments.rdzv_backend == "c10d"
        assert not arguments.standalone
        assert arguments.training_script == "train.py"


def test_words_of_the_script_are_the_scripts():
    found, arguments = listening_at([*TWO_HOSTS, "--rdzv-endpoint=192.0.2.1:1", "--rdzv-conf=is_host=0", "train.py"])
    assert found is None
    arguments = parse_args(["--nnodes=2", "train.py", "--standalone"])
    assert start_store(arguments, say=pytest.fail) is None
    assert arguments.training_script_args == ["--standalone"]


def connects(address, port):
    with socket.socket() as trying:
        trying.settimeout(20)
        return trying.connect_ex((address, port)) == 0


@pytest.mark.parametrize("conf", ["is_host=1", "is_host=true,timeout=7"])
def test_the_store_of_several_hosts_listens_on_the_endpoint_address_only(conf):
    arguments = parse_args([*TWO_HOSTS, "--rdzv-endpoint=127.0.78.1:0", f"--rdzv-conf={conf}", "train.py"])
    store = start_store(arguments, say=pytest.fail)
    assert connects("127.0.78.1", store.port)
    assert not connects("127.0.0.1", store.port)
    assert "is_host=0" in arguments.rdzv_conf
    assert arguments.rdzv_endpoint == f"127.0.78.1:{store.port}"


def test_a_second_agent_on_the_stores_host_is_its_client_and_one_that_must_have_it_is_refused():
    with socket.create_server(("127.0.78.2", 0)) as taken:
        endpoint = f"--rdzv-endpoint=127.0.78.2:{taken.getsockname()[1]}"
        found, arguments = listening_at([*TWO_HOSTS, endpoint])
        assert found is None
        assert arguments.rdzv_conf == "is_host=0"
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.78\.2:\d+ \(Address already in use\)"):
            listening_at([*TWO_HOSTS, endpoint, "--rdzv-conf=is_host=1"])


def test_an_address_of_another_machine_is_left_to_torch_with_a_log_line():
    log = []
    found, arguments = listening_at([*TWO_HOSTS, "--rdzv-endpoint=192.0.2.1:0", "--rdzv-conf=is_host=1"], log)
    assert found is None
    assert arguments.rdzv_conf == "is_host=1"
    assert log == ["192.0.2.1 is no address of this machine, so the job's store listens on all of its addresses"]


@pytest.mark.parametrize(
    ("host", "local", "wanted"),
    [
        ("localhost", None, "127.0.0.1"),
        ("127.0.78.1", "10.0.0.1", "127.0.78.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("fd00::1", None, "fd00::1"),
        ("127.1", "10.0.0.1", "10.0.0.1"),
        ("127.1", None, None),
        ("no-such-name.invalid", None, None),
    ],
)
def test_the_address_that_others_reach_a_store_by(host, local, wanted):
    """A machine's own name is often a loopback address on itself; 127.1 resolves to one and is none by its letters."""
    assert address_to_listen_on(host, local) == wanted


def test_a_name_that_resolves_to_loopback_is_left_to_torch_with_a_log_line():
    log = []
    found, _ = listening_at([*TWO_HOSTS, "--rdzv-endpoint=127.1:0", "--rdzv-conf=is_host=1"], log)
    assert found is None
    assert log == [
        "127.1 is a loopback address here, so the job's store listens on all addresses: --local-addr names one"
    ]


def test_other_backends_are_left_to_torch():
    for words in (["--rdzv-backend=etcd"], ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]):
        found, arguments = listening_at(["--nnodes=2", *words, "--rdzv-endpoint=localhost:1"])
        assert found is None
        assert arguments.rdzv_endpoint == "localhost:1"


# ---------------------------------------------------------------- the token


def token(words, environment):
    return token_of(parse_args([*words, "train.py"]), environment)


def test_a_job_of_one_host_has_a_token_of_its_own():
    assert len(token([], {})) == 32
    assert token([], {}) != token([], {}), "each job another"
    assert token(["--standalone"], {"NTP_TOKEN": ANY}) == ANY


@pytest.mark.parametrize("nnodes", ["2", "1:2", "16"])
def test_several_hosts_need_a_token_and_the_error_says_how_to_make_one(nnodes):
    with pytest.raises(ConfigError, match=r"NTP_TOKEN is not set.*export NTP_TOKEN=\$\(openssl rand -hex 16\)"):
        token([f"--nnodes={nnodes}"], {})
    assert token([f"--nnodes={nnodes}"], {"NTP_TOKEN": ANY}) == ANY


@pytest.mark.parametrize("words", [["--nnodes=2"], []])
def test_a_token_that_can_be_found_by_trying_is_refused(words):
    with pytest.raises(ConfigError, match="NTP_TOKEN has 6 characters; at least 16 are needed"):
        token(words, {"NTP_TOKEN": "secret"})


@pytest.mark.parametrize("words", [["--nnodes=many"], ["--rdzv-conf==1"], ["--rdzv-conf=is_host=perhaps", *TWO_HOSTS]])
def test_an_unreadable_endpoint_is_one_line(words):
    arguments = parse_args([*words, "train.py"])
    with pytest.raises(ConfigError):
        token_of(arguments, {"NTP_TOKEN": ANY})
        start_store(arguments, say=pytest.fail)


def test_ntp_run_on_several_hosts_without_a_token_ends_with_code_2(monkeypatch, capsys):
    monkeypatch.delenv("NTP_TOKEN", raising=False)
    assert main(["run", *TWO_HOSTS, "--rdzv-endpoint=127.0.78.3:0", __file__]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "export NTP_TOKEN=$(openssl rand -hex 16)" in line
