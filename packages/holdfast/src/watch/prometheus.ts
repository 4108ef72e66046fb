/** Figures for Prometheus, as text: `createServer(prometheus().handler).listen(9464, "127.0.0.1")`. */
import { checkNames } from "../input/options.ts";
import { type MeasureOptions, checkMeasures, measureOptions } from "./listen.ts";
import {
  type MeasureBook,
  type Labels,
  type Measure,
  type Sample,
  allMeasures,
  depths,
  exposed,
  keep,
  measures,
} from "./measures.ts";

export type { CountedQueue, MeasureOptions } from "./listen.ts";

export interface PrometheusOptions extends MeasureOptions {
  /** Put on every sample, e.g. `{ service: "api" }`. Prometheus adds `job` and `instance` by itself. */
  readonly labels?: Readonly<Record<string, string>>;
}

/** As much of Node's `IncomingMessage` and `ServerResponse` as is needed. */
export interface RequestLike {
  readonly method?: string | undefined;
}
export interface ResponseLike {
  statusCode: number;
  setHeader(name: string, value: string): unknown;
  end(body?: string): unknown;
}

export interface Prometheus extends Disposable {
  /** Of the text, in the exposition format 0.0.4. */
  readonly contentType: string;
  /** What has been counted since this was made. */
  text(): Promise<string>;
  /** For `node:http`, Express, and whatever else has `(req, res)`. Who may ask is your affair. */
  readonly handler: (req: RequestLike, res: ResponseLike) => void;
  /** For handlers of the Fetch API. */
  response(): Promise<Response>;
  /** Ends the subscriptions. What has been counted stays. */
  stop(): void;
}

const contentType = "text/plain; version=0.0.4; charset=utf-8";
const names = new Set([...measureOptions, "labels"]);
/** Series of one measure. What comes after is counted together: an id that became a label must not eat the memory. */
const most = 1000;

interface Series {
  readonly labels: Labels;
  value: number;
  readonly counts: number[];
  count: number;
}

/** Counts from now on. */
export function prometheus(options: PrometheusOptions = {}): Prometheus {
  checkNames("prometheus", options, names);
  checkMeasures("prometheus", options);
  const { queues = [], labels: always = {} } = options;
  const ledger = new Ledger(always);
  const stop = keep(ledger, options);
  let asking: Promise<readonly Sample[]> | undefined;
  const text = async (): Promise<string> => {
    // Two who look at once ask the database once.
    asking ??= depths(queues, ledger).finally(() => (asking = undefined));
    return ledger.text(await asking);
  };
  const answer = async (res: ResponseLike, withBody: boolean): Promise<void> => {
    const body = await text();
    res.setHeader("Content-Type", contentType);
    res.end(withBody ? body : undefined);
  };
  return {
    contentType,
    text,
    handler(req, res) {
      const { method = "GET" } = req;
      if (method === "GET" || method === "HEAD") return void answer(res, method === "GET");
      res.statusCode = 405;
      res.setHeader("Allow", "GET, HEAD");
      res.end();
    },
    response: async () => new Response(await text(), { headers: { "Content-Type": contentType } }),
    stop,
    [Symbol.dispose]: stop,
  };
}

class Ledger implements MeasureBook {
  readonly #always: Labels;
  readonly #series = new Map<Measure, Map<string, Series>>(allMeasures.map((each) => [each, new Map()]));

  constructor(always: Labels) {
    this.#always = always;
  }

  add(measure: Measure, value: number, labels: Labels): void {
    this.#of(measure, labels).value += value;
  }

  record(measure: Measure, seconds: number, labels: Labels): void {
    const series = this.#of(measure, labels);
    const { buckets = [] } = measure;
    const at = buckets.findIndex((bound) => seconds <= bound);
    const place = at < 0 ? buckets.length : at;
    series.counts[place] = (series.counts[place] ?? 0) + 1;
    series.value += seconds;
    series.count++;
  }

  #of(measure: Measure, labels: Labels): Series {
    const all = this.#series.get(measure) as Map<string, Series>;
    let key = keyOf(labels);
    let found = all.get(key);
    if (found) return found;
    let kept = labels;
    if (all.size >= most) {
      kept = Object.fromEntries(Object.keys(labels).map((name) => [name, "other"]));
      key = keyOf(kept);
      found = all.get(key);
    }
    if (!found) all.set(key, (found = { labels: kept, value: 0, counts: [], count: 0 }));
    return found;
  }

  text(depth: readonly Sample[]): string {
    const lines: string[] = [];
    for (const [measure, series] of this.#series) {
      const name = exposed(measure);
      const type = measure.kind === "updown" ? "gauge" : measure.kind;
      lines.push(`# HELP ${name} ${measure.help.replaceAll("\\", "\\\\").replaceAll("\n", "\\n")}`);
      lines.push(`# TYPE ${name} ${type}`);
      const sample = (end: string, labels: Labels, value: number) =>
        lines.push(`${name}${end}${written({ ...this.#always, ...labels })} ${number(value)}`);
      for (const each of series.values()) {
        if (measure.kind !== "histogram") {
          sample("", each.labels, each.value);
          continue;
        }
        let below = 0;
        for (const [i, bound] of (measure.buckets ?? []).entries())
          sample("_bucket", { ...each.labels, le: number(bound) }, (below += each.counts[i] ?? 0));
        sample("_bucket", { ...each.labels, le: "+Inf" }, each.count);
        sample("_sum", each.labels, each.value);
        sample("_count", each.labels, each.count);
      }
      // Not from the books: they are the database's, and of this moment.
      if (measure === measures.depth) for (const { labels, value } of depth) sample("", labels, value);
    }
    return `${lines.join("\n")}\n`;
  }
}

/** The labels of one measure always come in the same order. Escaping is for those who read, which is seldom. */
function keyOf(labels: Labels): string {
  let key = "";
  for (const name in labels) key += `${labels[name] as string}\0`;
  return key;
}

function number(value: number): string {
  return value === Infinity ? "+Inf" : value === -Infinity ? "-Inf" : String(value);
}

function written(labels: Labels): string {
  const pairs = Object.entries(labels).map(([name, value]) => `${name}="${escaped(value)}"`);
  return pairs.length === 0 ? "" : `{${pairs.join(",")}}`;
}

function escaped(value: string): string {
  return value.replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n");
}
