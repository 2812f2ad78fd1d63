"""Reads the files of a running or finished run and turns them into tables and text."""
