"""The HTTP server: OpenAI's interface over one continuous batch. Needs the extra `serve`."""
