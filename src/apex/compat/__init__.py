"""Stand-ins for other packages, which only an explicit call installs."""
