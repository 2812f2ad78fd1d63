"""Pipeline schedules as tables of actions, and what runs them."""
