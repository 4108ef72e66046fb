/** A Prometheus of its own, which scrapes what it is told and evaluates rules, on a faster clock. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { startServer } from "../../packages/cli/src/server-process.ts";

const PROGRAM = "/usr/bin/prometheus";

/** Why it is not here; undefined: it is. */
export function noPrometheus(): string | undefined {
  return existsSync(PROGRAM) ? undefined : `Prometheus is not available: there is no ${PROGRAM}`;
}

const seconds = { s: 1, m: 60, h: 3600 };

/** How often a minute of the rules goes into a minute of the test's. */
const speed = 30;

/** The same rules on a faster clock: their durations are shorter, and their rates, which are per second, as much higher. */
export function faster(rules: string): string {
  return rules
    .replaceAll(/\brate\([^()]*\[\w+\]\)/g, (rate) => `(${rate} / ${speed})`)
    .replaceAll(
      /(\[|for: |offset )(\d+)([smh])\b/g,
      (_, before: string, n: string, unit: keyof typeof seconds) =>
        `${before}${(Number(n) * seconds[unit] * 1000) / speed}ms`,
    );
}

export interface Prometheus {
  /** Alerts that have fired so far, each as "job alert", in order. */
  fired(): Promise<readonly string[]>;
  /** The value of each series that a query finds now. */
  query(expr: string): Promise<readonly number[]>;
  stop(): Promise<void>;
}

/** `targets`: by the name of the job, where it is scraped ("127.0.0.1:9464"). */
export async function startPrometheus(
  rules: string,
  targets: Readonly<Record<string, readonly string[]>>,
): Promise<Prometheus> {
  const config = {
    // As 30 s are to a minute.
    global: { scrape_interval: "1s", scrape_timeout: "1s", evaluation_interval: "1s" },
    rule_files: ["rules.yml"],
    scrape_configs: Object.entries(targets).map(([job, addresses]) => ({
      job_name: job,
      static_configs: [{ targets: addresses }],
    })),
  };
  const server = await startServer({
    name: "prometheus",
    stopSignal: "TERM",
    async prepare(place) {
      await place.write("rules.yml", rules);
      // What is JSON is YAML, too.
      await place.write("prometheus.yml", JSON.stringify(config));
    },
    command: ({ dir }, port) => ({
      file: PROGRAM,
      args: [
        `--config.file=${join(dir, "prometheus.yml")}`,
        `--storage.tsdb.path=${join(dir, "data")}`,
        `--web.listen-address=127.0.0.1:${port}`,
      ],
    }),
    async ready(port) {
      const answer = await fetch(`http://127.0.0.1:${port}/-/ready`);
      if (!answer.ok) throw new Error(await answer.text());
    },
  });
  const ask = async (expr: string) => {
    const url = `http://127.0.0.1:${server.port}/api/v1/query?query=${encodeURIComponent(expr)}`;
    const { data, error } = (await (await fetch(url)).json()) as {
      readonly data: {
        readonly result: readonly { metric: Record<string, string>; value: [number, string] }[];
      };
      readonly error?: string;
    };
    if (error !== undefined) throw new Error(error);
    return data.result;
  };
  return {
    async fired() {
      const found = await ask(
        'group by (job, alertname) (present_over_time(ALERTS{alertstate="firing"}[1h]))',
      );
      return found.map(({ metric }) => `${metric["job"]} ${metric["alertname"]}`).toSorted();
    },
    query: async (expr) => (await ask(expr)).map(({ value }) => Number(value[1])),
    stop: server.stop,
  };
}
