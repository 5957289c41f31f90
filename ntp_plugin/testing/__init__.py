"""Ranks that can be started, killed, frozen and started again, for tests and for rehearsals of a recipe.

ranks.py    real processes with a real store, and a supervisor that publishes deaths
"""
