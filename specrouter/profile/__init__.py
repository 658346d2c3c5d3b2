"""Measurements and predictions: times and acceptances of models, and predicted cycles."""
