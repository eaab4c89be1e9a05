"""Pages and Markdown about merges and suites: `write_report` makes them."""
