"""TLS in front of a server at a unix socket: listens at `host port` with a certificate and a key
from files, until killed.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from asyncio import StreamReader, StreamWriter


async def passed(read: StreamReader, write: StreamWriter) -> None:
    """Copies until one side ends."""
    try:
        while data := await read.read(65_536):
            write.write(data)
            await write.drain()
    except ConnectionError:  # its peer has gone
        pass
    finally:
        write.close()


async def listen(host: str, port: str, cert: str, key: str, socket: str) -> None:
    async def joined(read: StreamReader, write: StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(socket)
        await asyncio.gather(passed(read, back), passed(there, write))

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = await asyncio.start_server(joined, host, int(port), ssl=context)
    print("there", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(listen(*sys.argv[1:]))
