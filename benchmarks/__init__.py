"""Measurements that anybody can repeat, each a script that prints JSON or a table of evidence."""
