# The image of driver-manager. docs/image.md says how to build and run it; images/build does it without a daemon or network.
#
# BASE: any image with glibc, coreutils, /bin/sh and Python 3.11 or newer as python3.
ARG BASE=docker.io/library/python:3.13-slim-trixie

# Locked packages, in an environment of their own so that nothing of the base's Python packages is seen.
FROM ${BASE} AS packages
# How to run pip for the first time; from then on it is the locked one.
ARG BOOT_PIP="python3 -m pip"
# Set where the wheels are mounted into the build instead of fetched.
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
COPY images/build-requirements.txt /src/images/
RUN python3 -m venv --without-pip /build \
    && ${BOOT_PIP} --python /build/bin/python3 install -q --require-hashes --no-deps --only-binary :all: -r /src/images/build-requirements.txt
COPY images/requirements.txt images/trim /src/images/
RUN python3 -m venv --without-pip /opt/driver-manager \
    && /build/bin/python3 -m pip --python /opt/driver-manager/bin/python3 install -q --no-compile --require-hashes --no-deps \
        --only-binary :all: -r /src/images/requirements.txt \
    && find /opt/driver-manager/bin -type f -delete \
    && sh /src/images/trim packages "$(/opt/driver-manager/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# The project, as a wheel. It is laid out as it lies in the image, so that a change of it makes one small layer.
FROM packages AS project
COPY LICENSE README.md pyproject.toml /src/
COPY driver_manager /src/driver_manager
COPY images/start /src/images/
RUN cd /src \
    && /build/bin/python3 -m pip wheel -q --no-build-isolation --no-deps --wheel-dir /dist . \
    && site=$(/opt/driver-manager/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    && /build/bin/python3 -m pip --python /opt/driver-manager/bin/python3 install -q --no-compile --no-deps --no-index --target "/project$site" /dist/*.whl \
    && rm -r "/project$site/bin" \
    && python3 -m compileall -q -s /project --invalidation-mode unchecked-hash "/project$site" \
    && install -D -m 755 images/start /project/usr/local/bin/driver-manager \
    && ln -s driver-manager /project/usr/local/bin/vfio-manage \
    && install -D -m 644 LICENSE /project/licenses/LICENSE

# The base without pip and what else is of no use. Copied as a whole, so that what is taken out does not stay in a layer below.
FROM ${BASE} AS base
COPY images/trim /tmp/trim
RUN sh /tmp/trim base && rm /tmp/trim

FROM scratch
COPY --from=base / /
COPY --from=packages /opt/driver-manager /opt/driver-manager
COPY --from=project /project /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
USER 0:0
WORKDIR /
ENTRYPOINT ["driver-manager"]
CMD ["preflight_check"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="driver-manager" \
    org.opencontainers.image.description="Frees a Kubernetes node of everything that uses the NVIDIA driver, completely and reversibly" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
