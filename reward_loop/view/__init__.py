"""Shows the records of a run: the pages in the browser and their server, the timeline of a step."""
