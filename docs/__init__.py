"""The sources of the docs site. `site_hooks` builds the site; `reference_pages` writes the pages
that list what is in the code."""
