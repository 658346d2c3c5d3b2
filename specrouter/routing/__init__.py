"""Which chain of models drafts for which requests, and when that is decided anew."""
