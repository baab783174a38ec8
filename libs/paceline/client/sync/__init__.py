# Generated from paceline/client/aio by .ci/client. Do not edit: `make client`.
"""The client for asyncio. paceline/client/sync is generated from this folder: `make client`."""
