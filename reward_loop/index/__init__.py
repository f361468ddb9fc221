"""The index of a records folder, and the questions that the report, the viewer and the audit ask it."""
