# mats with everything it can use; models and recipes are in the folder /work:
#   docker build -t matsmerge .
#   docker run --rm -v "$PWD:/work" matsmerge merge recipe.yaml --out merged
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir "/source[all]" && rm -r /source
WORKDIR /work
ENTRYPOINT ["mats"]
CMD ["--help"]
