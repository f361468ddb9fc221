"""Shows the records of a run: the page in the browser, the timeline of a step, the trace."""
