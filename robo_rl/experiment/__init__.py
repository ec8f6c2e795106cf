"""What a run is: its configuration, its folder, the loops that train, evaluation."""
