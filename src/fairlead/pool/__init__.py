"""How endpoints become known: files, Kubernetes, scraping, KV events."""
