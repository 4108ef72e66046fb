/**
 * A strict reader of Prometheus' text format 0.0.4, by its grammar: what a scraper would refuse, or take for something
 * else, throws.
 */
export interface Family {
  readonly type: string;
  readonly help: string;
  /** By name and labels, as `name{a="b"}` with the labels in order. */
  readonly samples: Map<string, number>;
}

const line = {
  help: /^# HELP ([a-zA-Z_:][\w:]*) (.+)$/,
  type: /^# TYPE ([a-zA-Z_:][\w:]*) (counter|gauge|histogram)$/,
  sample: /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (NaN|[+-]Inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)$/,
  label: /^([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)/,
};

export function parseExposition(text: string): Map<string, Family> {
  if (!text.endsWith("\n")) throw new Error("the last line does not end");
  const families = new Map<string, Family>();
  let name = "";
  let family: Family | undefined;
  let help: [string, string] | undefined;
  for (const each of text.slice(0, -1).split("\n")) {
    const helped = line.help.exec(each);
    const typed = line.type.exec(each);
    if (helped) help = [helped[1] as string, helped[2] as string];
    else if (typed) {
      name = typed[1] as string;
      if (help?.[0] !== name) throw new Error(`TYPE without HELP: ${each}`);
      if (families.has(name)) throw new Error(`${name} twice`);
      family = { type: typed[2] as string, help: help[1], samples: new Map() };
      families.set(name, family);
    } else {
      const sample = line.sample.exec(each);
      if (!sample || !family) throw new Error(`not a sample: ${each}`);
      const [, sampled = "", labels = "", value = ""] = sample;
      const end = sampled.slice(name.length);
      const ends = family.type === "histogram" ? ["_bucket", "_sum", "_count"] : [""];
      if (!sampled.startsWith(name) || !ends.includes(end)) throw new Error(`${each} is not of ${name}`);
      const key = sampled + shown(parseLabels(labels, each));
      if (family.samples.has(key)) throw new Error(`${key} twice`);
      family.samples.set(key, value === "+Inf" ? Infinity : Number(value));
    }
  }
  for (const [of, { type, samples }] of families) if (type === "histogram") checkHistogram(of, samples);
  return families;
}

function parseLabels(text: string, whole: string): Record<string, string> {
  const labels: Record<string, string> = {};
  for (let rest = text; rest !== "";) {
    const found = line.label.exec(rest);
    if (!found) throw new Error(`labels: ${whole}`);
    const [all, name = "", value = ""] = found;
    if (name in labels) throw new Error(`label ${name} twice: ${whole}`);
    labels[name] = value.replaceAll(/\\(.)/g, (_, c: string) => (c === "n" ? "\n" : c));
    rest = rest.slice(all.length);
  }
  return labels;
}

export function shown(labels: Readonly<Record<string, string>>): string {
  const pairs = Object.entries(labels).toSorted(([a], [b]) => (a < b ? -1 : 1));
  return pairs.length === 0 ? "" : `{${pairs.map(([name, value]) => `${name}="${value}"`).join(",")}}`;
}

/** Buckets grow, the last is +Inf and as large as the count, and there is a sum. */
function checkHistogram(name: string, samples: ReadonlyMap<string, number>): void {
  const last = new Map<string, [bound: number, value: number]>();
  for (const [key, value] of samples) {
    const le = /le="([^"]*)",?/.exec(key);
    if (!key.startsWith(`${name}_bucket`) || !le) continue;
    const series = key.slice(`${name}_bucket`.length).replace(le[0], "").replace(",}", "}").replace("{}", "");
    const bound = le[1] === "+Inf" ? Infinity : Number(le[1]);
    const [before, less] = last.get(series) ?? [-Infinity, 0];
    if (!(bound > before) || value < less) throw new Error(`${key} ${value} after ${before} ${less}`);
    last.set(series, [bound, value]);
  }
  for (const [series, [bound, value]] of last) {
    if (bound !== Infinity) throw new Error(`${name}${series} has no +Inf`);
    if (samples.get(`${name}_count${series}`) !== value) throw new Error(`${name}_count${series}`);
    if (!samples.has(`${name}_sum${series}`)) throw new Error(`${name}_sum${series} is missing`);
  }
}
