/** What a quota was defined to be, and what that makes of what is counted. */
import { checkNames } from "../input/options.ts";
import { shown } from "../seam/shown.ts";
import { checkText } from "../input/values.ts";
import { UsageError } from "../seam/errors.ts";
import { type Span, spanOf, startsAround } from "../time/windows.ts";
import { checkZone } from "../time/zone.ts";
import { checkLimit } from "./checks.ts";
import type { BucketStanding, Definition, UseVerdict } from "./store.ts";
import type { QuotaOptions, QuotaStanding, Subject } from "./types.ts";

const names = new Set(["name", "limit", "per", "window", "parts", "timeZone", "over"]);

export class Terms {
  readonly name: string;
  readonly #options: QuotaOptions;
  readonly #span: Span | undefined;
  readonly #zone: string;
  #definition: { readonly definition: Definition; readonly until: number; readonly from: number } | undefined;

  constructor(options: QuotaOptions) {
    checkNames("quota", options, names);
    const { name, limit, per, timeZone = "UTC" } = options;
    checkText("quota", "name", name, { most: 200 });
    checkLimits(name, limit);
    checkWindow(options);
    checkZone("quota", timeZone);
    this.name = name;
    this.#options = options;
    this.#span = per === undefined ? undefined : spanOf("quota", per);
    this.#zone = timeZone;
  }

  /** Milliseconds; of months and years on average. */
  get windowMs(): number | undefined {
    return this.#span?.ms;
  }

  /** What is used is what the entries of a window say. */
  get slides(): boolean {
    return this.#options.window?.startsWith("sliding") ?? false;
  }

  /** For how many milliseconds a window that slides counts an entry: one in parts up to a part longer. */
  get countedMs(): number {
    const { window = "fixed", parts = 20 } = this.#options;
    if (!this.#span || window === "fixed") return 0;
    return this.#span.ms * (window === "sliding-parts" ? 1 + 1 / parts : 1);
  }

  checkPlan(plan: string | undefined): void {
    const { limit } = this.#options;
    const plans = typeof limit === "object" ? limit.plans : {};
    if (plan !== undefined && (typeof plan !== "string" || !Object.hasOwn(plans, plan)))
      throw new UsageError(`quota ${this.name}: there is no plan ${shown(plan)}`);
  }

  /** The limit that the code has for a subject, at once if it is not computed; undefined: none. */
  limitOf(subject: Subject): number | undefined | Promise<number | undefined> {
    const { limit } = this.#options;
    if (typeof limit === "function") return computed(limit, subject);
    const found = typeof limit === "object" ? limit.plans[limit.default] : limit;
    return found === Infinity ? undefined : found;
  }

  /** As engines are told, with the windows around this time; `until`: and all up to that one. */
  definition(now: number, until = now): Definition {
    const known = this.#definition;
    if (known && now >= known.from && until < known.until) return known.definition;
    const { window = "fixed", parts = 20, over = "reject", limit } = this.#options;
    const span = this.#span;
    const common = {
      plans: typeof limit === "object" ? limit.plans : undefined,
      over: over === "record" ? undefined : over === "reject" ? 0 : over,
    };
    const per = (span?.ms ?? 0) * 1000;
    const starts = span && window === "fixed" ? startsAround(span, this.#zone, now, until) : [];
    const definition: Definition = {
      ...common,
      rule: !span
        ? { window: "none" }
        : window === "fixed"
          ? { window, starts }
          : window === "sliding-parts"
            ? { window: "parts", per, parts }
            : { window: window === "refill" ? "refill" : "log", per },
    };
    this.#definition = {
      definition,
      from: starts[1] ?? -Infinity,
      until: starts[2] ?? Infinity,
    };
    return definition;
  }

  standing({ used, held, credit, limit = Infinity, at }: BucketStanding): QuotaStanding {
    return {
      used,
      held,
      limit,
      credit,
      remaining: Math.max(0, limit - used - held + credit),
      over: Math.max(0, used - limit),
      resetAt: this.#reset(at),
      at: new Date(at),
    };
  }

  /** Milliseconds until what was refused may be granted; undefined: time alone does not help. */
  retryAfter(amount: number, { retry, limit = Infinity, credit, at }: UseVerdict): number | undefined {
    const { over = "reject" } = this.#options;
    const most = limit + (over === "reject" ? 0 : over === "record" ? Infinity : over) + credit;
    if (amount > most || retry === undefined || retry === "never") return undefined;
    if (retry === "window") {
      const reset = this.#reset(at);
      return reset ? Math.max(0, reset.getTime() - at) : undefined;
    }
    return Math.max(0, retry / 1000);
  }

  #reset(at: number): Date | undefined {
    const { rule } = this.definition(at);
    const next = rule.window === "fixed" ? rule.starts.find((start) => start > at) : undefined;
    return next === undefined ? undefined : new Date(next);
  }
}

async function computed(
  limit: Extract<QuotaOptions["limit"], (...args: never[]) => unknown>,
  subject: Subject,
): Promise<number | undefined> {
  const found = await limit(subject);
  checkLimit(found);
  return found === Infinity ? undefined : found;
}

function checkLimits(name: string, limit: QuotaOptions["limit"]): void {
  if (typeof limit === "number") checkLimit(limit);
  else if (typeof limit === "object" && limit !== null) {
    for (const [plan, each] of Object.entries(limit.plans ?? {})) {
      checkText(`quota ${name}`, "the name of a plan", plan, { most: 200 });
      checkLimit(each);
    }
    if (typeof limit.default !== "string" || !Object.hasOwn(limit.plans ?? {}, limit.default))
      throw new UsageError(`quota ${name}: there is no plan ${shown(limit.default)} among \`plans\``);
  } else if (typeof limit !== "function")
    throw new UsageError(`quota ${name}: limit must be a number, a function, or numbers by plan`);
}

function checkWindow({ name, per, window = "fixed", parts, over = "reject" }: QuotaOptions): void {
  if (!["fixed", "sliding-log", "sliding-parts", "refill"].includes(window))
    throw new UsageError(`quota ${name}: there is no window ${shown(window)}`);
  if (per === undefined && window !== "fixed")
    throw new UsageError(`quota ${name}: a window that slides or refills needs \`per\``);
  if (
    parts !== undefined &&
    (window !== "sliding-parts" || !Number.isSafeInteger(parts) || parts < 1 || parts > 1000)
  )
    throw new UsageError(`quota ${name}: parts must be a whole number from 1 to 1000, with "sliding-parts"`);
  if (over !== "reject" && over !== "record" && !(Number.isSafeInteger(over) && over >= 0))
    throw new UsageError(`quota ${name}: over must be "reject", "record" or a whole number of units`);
}
