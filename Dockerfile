# The exporter with all that it can use in a container: CUPTI for PM sampling, gRPC for the kubelet.
# Not slim: it has the C compiler that the kernel agent is built with. Pods copy the agent from the place of the link.
FROM python:3.13.14-bookworm AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY exporter exporter
# Rules, dashboards and manifests of this version, for who has the image alone: /opt/gpu-hpc-exporter/share.
COPY alert-rules alert-rules
COPY dashboards dashboards
COPY deploy deploy
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/gpu-hpc-exporter \
    && python -m pip --python /opt/gpu-hpc-exporter install --no-cache-dir "$(echo /wheels/*.whl)[cupti,kubernetes]" \
    && cd /opt/gpu-hpc-exporter/lib \
    && ln -s python3*/site-packages/gpu_hpc_exporter/agent/libgpu_hpc_agent.so . \
    && test -f libgpu_hpc_agent.so

FROM python:3.13.14-slim-bookworm
COPY --from=build /opt/gpu-hpc-exporter /opt/gpu-hpc-exporter
ENV PATH=/opt/gpu-hpc-exporter/bin:$PATH
# For NVIDIA's container runtime, where it is the default or a Kubernetes runtime class; CUPTI needs `compute`.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility,compute
USER 65534:65534
EXPOSE 9836
ENTRYPOINT ["gpu-hpc-exporter"]
