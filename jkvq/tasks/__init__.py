"""Tasks of the papers: problems, scores, and the jobs that put every cache through them."""
