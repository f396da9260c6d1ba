# Where graders judge: as for agents, with numpy and pytest for tests that need them. `agentrl images build` makes it.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN /usr/bin/python3 -c 'import numpy, pytest' 2>/dev/null || { \
    apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-numpy python3-pytest \
    && rm -rf /var/lib/apt/lists/*; }
# Nothing inside may gain rights; the container forbids it too.
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +
