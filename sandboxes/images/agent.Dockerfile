# Where agents work: Debian's python3 and the usual small tools. `agentrl images build` makes it.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN /usr/bin/python3 -c 1 2>/dev/null || { \
    apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*; }
# Nothing inside may gain rights; the container forbids it too.
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +
