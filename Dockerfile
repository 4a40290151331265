# The command line in a container: docker build -t scalelong . && docker run --rm -v "$PWD:/work" scalelong demo
# torch comes first, pinned by constraints.txt. For its small CPU build give the index that has it:
# docker build --build-arg PIP_EXTRA_INDEX_URL=... -t scalelong .
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /scalelong
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m pip install --no-cache-dir --constraint constraints.txt torch \
    && python -m pip install --no-cache-dir --constraint constraints.txt '.[all]'
# Runs, samples and reports are written below the folder that is mounted here, by a user without rights elsewhere.
RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["scalelong"]
CMD ["--help"]
