"""From a death to the next step.

trainer.py   what an adapter provides
driver.py    the walk itself
"""
