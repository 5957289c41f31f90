"""Measurements that anyone can repeat. Each is a script that prints JSON or a table of evidence."""
