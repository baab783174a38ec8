"""Opens sessions at the gateway and rewards them; agents generate with the `openai` package
(docs/agents.md).

    from paceline.client import Client

    with Client("http://127.0.0.1:7408") as client:
        with client.session(task="gsm8k-17", group="g1", group_size=8) as session:
            question = {"role": "user", "content": "6 * 7 = ?"}
            answer = session.openai.chat.completions.create(model="", messages=[question])
            session.reward(1.0 if "42" in (answer.choices[0].message.content or "") else 0.0)

An agent's process loads no gRPC and no torch.
"""

from paceline.client.client import AsyncClient as AsyncClient
from paceline.client.client import Client as Client
from paceline.client.client import find_token as find_token
from paceline.client.session import AsyncSession as AsyncSession
from paceline.client.session import Sample as Sample
from paceline.client.session import Session as Session
from paceline.client.session import SessionInfo as SessionInfo
from paceline.client.session import Task as Task
from paceline.client.traces import trace_headers as trace_headers
