"""Every policy and architecture implemented a second time, slowly and independently, and the library compared with it."""
