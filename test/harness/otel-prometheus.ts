/** OpenTelemetry's exporter for Prometheus, as an application would have it. */
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import type { Meter } from "@opentelemetry/api";
import { PrometheusExporter } from "@opentelemetry/exporter-prometheus";
import { MeterProvider } from "@opentelemetry/sdk-metrics";
import { type Family, parseExposition } from "./exposition.ts";

export interface OtelPrometheus {
  readonly meter: Meter;
  /** Where it is served, under /metrics. */
  readonly address: string;
  /** As it is served. */
  text(): Promise<string>;
  close(): Promise<void>;
}

export async function otelPrometheus(): Promise<OtelPrometheus> {
  // It cannot be told to take any port that is free.
  const exporter = new PrometheusExporter({ preventServerStart: true });
  const provider = new MeterProvider({ readers: [exporter] });
  const server = createServer((req, res) => exporter.getMetricsRequestHandler(req, res));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const address = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  return {
    meter: provider.getMeter("holdfast"),
    address,
    text: async () => (await fetch(`http://${address}/metrics`)).text(),
    async close() {
      // Prometheus keeps its connection.
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
      await provider.shutdown();
    },
  };
}

/** Without what the exporter adds by itself: the units, `target_info`, and the label of the scope. */
export function parseOtel(text: string): Map<string, Family> {
  const ours = text
    .split("\n")
    .filter((line) => !line.startsWith("# UNIT ") && !/^(# \w+ )?target_info\b/.test(line))
    .map((line) =>
      line
        .replace(/,?otel_scope_name="[^"]*"/, "")
        .replace("{,", "{")
        .replace("{}", ""),
    );
  return parseExposition(ours.join("\n"));
}
