"""pytest glue for a clone: the plugin does the work, so that it can be used without this file too."""

pytest_plugins = ["shardproof.harness.runner.plugin"]
