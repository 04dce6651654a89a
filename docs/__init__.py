"""The site. Its pages and settings; `_site` has what makes pages from data."""
