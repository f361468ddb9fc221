"""Judges for your own functions: copy a file, and change it. Rows for the commands of docs/judges.md."""
