"""What is known of the models: times, acceptances, and what cycles are predicted to bring."""
