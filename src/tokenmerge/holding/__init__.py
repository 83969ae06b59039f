"""Hold: some steps do not run. Residuals, the sites that keep and add them, and the controller that directs both."""
