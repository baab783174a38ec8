"""The client for asyncio. paceline/client/sync is generated from this folder: `make client`."""
