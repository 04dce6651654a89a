# flashlab with its lessons, a C++ compiler for the emulator, and JupyterLab. Binder and the devcontainer build it, too.
#
#   docker build -t flashlab . && docker run --rm -p 8888:8888 flashlab
FROM python:3.12-slim-bookworm

RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*

# Binder says who the user is. JupyterLab isn't run as root.
ARG NB_USER=learner
ARG NB_UID=1000
RUN useradd --create-home --uid ${NB_UID} ${NB_USER}
ENV HOME=/home/${NB_USER}
WORKDIR ${HOME}/flashlab
COPY --chown=${NB_UID} . .
RUN chown ${NB_UID} .
USER ${NB_USER}

RUN python -m venv ${HOME}/venv
ENV PATH=${HOME}/venv/bin:${PATH}
RUN pip install --no-cache-dir --require-hashes --requirement requirements/lab.txt
RUN pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable .

EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "notebooks/00_memory.ipynb"]
