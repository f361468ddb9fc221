"""The viewer of records in the browser: an index of the records folder, and the server of the pages."""
