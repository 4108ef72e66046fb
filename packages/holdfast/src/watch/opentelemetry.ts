/** Spans and metrics: `import * as api from "@opentelemetry/api"; openTelemetry(api)`. */
import { HoldfastError, UsageError, message } from "../seam/errors.ts";
import type { Traced } from "../events/events.ts";
import { checkNames } from "../input/options.ts";
import { isError, isOpaque, read } from "../seam/thrown.ts";
import { type MeasureOptions, type Tracer, checkMeasures, listen, measureOptions, trace } from "./listen.ts";
import {
  type MeasureBook,
  type Labels,
  type Measure,
  allMeasures,
  depths,
  keep,
  measures,
} from "./measures.ts";

export type { CountedQueue, MeasureOptions } from "./listen.ts";

export type Attributes = Record<string, string | number | boolean | string[]>;

/** As much of the package `@opentelemetry/api` as is needed: of any version that has it. */
export interface Api<Context, S extends SpanLike> {
  readonly context: {
    active(): Context;
    with<T>(context: Context, run: () => T): T;
  };
  readonly trace: {
    getTracer(name: string): TracerLike<Context, S>;
    getSpan(context: Context): S | undefined;
    setSpan(context: Context, span: S): Context;
  };
  readonly metrics: { getMeter(name: string): MeterLike };
}

export interface SpanLike {
  setAttributes(attributes: Attributes): unknown;
  addEvent(name: string, attributes?: Attributes): unknown;
  setStatus(status: { code: number; message?: string }): unknown;
  recordException(error: Error | string): unknown;
  end(): void;
}

export interface TracerLike<Context, S extends SpanLike> {
  startSpan(
    name: string,
    options?: { kind?: number; root?: boolean; attributes?: Attributes },
    context?: Context,
  ): S;
}

export interface InstrumentOptions {
  description?: string;
  unit?: string;
  advice?: { explicitBucketBoundaries?: number[] };
}

type Observe = (result: { observe(value: number, attributes?: Labels): void }) => Promise<void>;

export interface MeterLike {
  createCounter(name: string, options?: InstrumentOptions): Adding;
  createUpDownCounter(name: string, options?: InstrumentOptions): Adding;
  createHistogram(name: string, options?: InstrumentOptions): Recording;
  createObservableGauge(
    name: string,
    options?: InstrumentOptions,
  ): { addCallback(observe: Observe): void; removeCallback(observe: Observe): void };
}

interface Adding {
  add(value: number, attributes?: Labels): void;
}
interface Recording {
  record(value: number, attributes?: Labels): void;
}

export interface OpenTelemetryOptions<Context, S extends SpanLike> extends MeasureOptions {
  /** Default: that of the global provider. `false`: no spans. */
  readonly tracer?: TracerLike<Context, S> | false;
  /** Default: that of the global provider, which must have been set by then. `false`: no metrics. */
  readonly meter?: MeterLike | false;
  /**
   * Exceptions with their messages and stacks, on the spans. They may hold values: "invalid input syntax for type
   * integer: …". Default `false`: `error.type` alone, which is the code or the class.
   */
  readonly recordErrors?: boolean;
}

export interface Telemetry extends Disposable {
  /** Ends the subscriptions, and the spans that are open. */
  stop(): void;
}

const scope = "holdfast";
const names = new Set([...measureOptions, "tracer", "meter", "recordErrors"]);
/** As the API numbers them. */
const kinds = { internal: 0, consumer: 4 };
const failed = 2;

/** Tells of everything that Holdfast does in this process, until it is stopped. */
export function openTelemetry<Context, S extends SpanLike>(
  api: Api<Context, S>,
  options: OpenTelemetryOptions<Context, S> = {},
): Telemetry {
  if (typeof api?.context?.with !== "function" || typeof api.trace?.getTracer !== "function")
    throw new UsageError('openTelemetry(api): give it all of "@opentelemetry/api": import * as api from …');
  checkNames("openTelemetry", options, names);
  checkMeasures("openTelemetry", options);
  const { tracer = api.trace.getTracer(scope), meter, recordErrors = false } = options;
  const ends: (() => void)[] = [];
  if (tracer) ends.push(spans(api, tracer, recordErrors));
  if (meter !== false) ends.push(metrics(meter ?? api.metrics.getMeter(scope), options));
  const stop = () => {
    for (const end of ends.splice(0)) end();
  };
  return { stop, [Symbol.dispose]: stop };
}

function spans<Context, S extends SpanLike>(
  { context, trace: spanOf }: Api<Context, S>,
  tracer: TracerLike<Context, S>,
  recordErrors: boolean,
): () => void {
  const running = new Map<object, S>();
  const holding = new Map<number, S>();

  const fail = (span: S, error: unknown) => {
    span.setAttributes({ "error.type": typeOf(error) });
    span.setStatus({ code: failed });
    if (!recordErrors) return;
    try {
      span.recordException(isError(error) ? error : message(error));
    } catch {
      // It reads more of it than we do.
      span.recordException(message(error));
    }
  };

  /** A span from the start to the end of what is traced, and the parent of whatever is begun inside. */
  const around = <M extends Traced>(
    begin: (message: M) => { name: string; attributes: Attributes; kind?: number; root?: boolean },
    end?: (span: S, message: M) => void,
  ): Tracer<M> => ({
    start(message) {
      const { name, ...rest } = begin(message);
      const outside = context.active();
      const span = tracer.startSpan(name, { kind: kinds.internal, ...rest }, outside);
      running.set(message, span);
      const inside = spanOf.setSpan(outside, span);
      message.wrap((run) => context.with(inside, run));
    },
    end(message) {
      const span = running.get(message);
      if (!span) return;
      running.delete(message);
      if (end) end(span, message);
      else if ("error" in message) fail(span, message.error);
      span.end();
    },
  });

  const hold = (id: number, kind: string, locks: readonly string[], attributes: Attributes = {}) => {
    const told = { "holdfast.lock.kind": kind, "holdfast.locks": [...locks], ...attributes };
    holding.set(id, tracer.startSpan("holdfast.lock.hold", { attributes: told }, context.active()));
  };
  const letGo = (id: number, lost?: { error: unknown }) => {
    const span = holding.get(id);
    if (!span) return;
    holding.delete(id);
    span.setAttributes({ "holdfast.outcome": lost ? "lost" : "released" });
    if (lost) fail(span, lost.error);
    span.end();
  };
  const here = () => spanOf.getSpan(context.active());

  const ends = [
    trace({
      "holdfast:transaction": around(
        ({ locks, isolation }) => ({
          name: "holdfast.transaction",
          attributes: { "holdfast.locks": [...locks], "holdfast.isolation": isolation },
        }),
        (span, message) => {
          const { attempts } = message;
          const ended = "error" in message ? endOf(message.error) : "commit";
          span.setAttributes({ "holdfast.attempts": attempts, "holdfast.outcome": ended });
          // Whoever does not want to wait is told that it is busy: that is an answer.
          if ("error" in message && ended !== "busy") fail(span, message.error);
        },
      ),
      "holdfast:retry": around(({ attempt, failure, delayMs }) => ({
        name: "holdfast.retry",
        attributes: {
          "holdfast.attempt": attempt,
          "holdfast.failure": failure,
          "holdfast.delay_ms": delayMs,
        },
      })),
      "holdfast:lock": around(
        ({ kind, locks }) => ({
          name: "holdfast.lock.wait",
          attributes: { "holdfast.lock.kind": kind, "holdfast.locks": [...locks] },
        }),
        (span, message) => {
          const { outcome } = message;
          span.setAttributes({ "holdfast.outcome": outcome ?? "error" });
          if (outcome === undefined) fail(span, message.error);
        },
      ),
      "holdfast:job": around(({ queue, job, attempt, transactional }) => ({
        name: "holdfast.job",
        kind: kinds.consumer,
        // It has nothing to do with whatever was going on when the worker was made.
        root: !transactional,
        attributes: { "holdfast.queue": queue, "holdfast.job": job, "holdfast.attempt": attempt },
      })),
      "holdfast:schedule": around(({ schedule, tick, fence, attempt, manual }) => ({
        name: "holdfast.schedule",
        root: !manual,
        attributes: {
          "holdfast.schedule": schedule,
          "holdfast.tick": tick.toISOString(),
          "holdfast.fence": fence,
          "holdfast.attempt": attempt,
        },
      })),
    }),
    listen({
      "holdfast:transaction:retry"({ attempt, failure, delayMs }) {
        here()?.addEvent("holdfast.retry", {
          "holdfast.attempt": attempt,
          "holdfast.failure": failure,
          "holdfast.delay_ms": delayMs,
        });
      },
      "holdfast:connection:wrong"({ query = "unknown", transaction = "unknown" }) {
        here()?.addEvent("holdfast.connection.wrong", {
          "holdfast.query.place": query,
          "holdfast.transaction.place": transaction,
        });
      },
      "holdfast:hazard"({ kind, place = "unknown" }) {
        here()?.addEvent("holdfast.hazard", { "holdfast.hazard.kind": kind, "holdfast.place": place });
      },
      "holdfast:section:slow"({ level, heldMs, place = "unknown", slowest }) {
        here()?.addEvent("holdfast.section.slow", {
          "holdfast.section.level": level,
          "holdfast.held_ms": heldMs,
          "holdfast.place": place,
          ...(slowest && {
            "holdfast.slowest.statement": slowest.statement,
            "holdfast.slowest.duration_ms": slowest.durationMs,
          }),
        });
      },
      "holdfast:session:held": (event) => hold(event.hold, "session", event.locks),
      "holdfast:session:released": (event) => letGo(event.hold),
      "holdfast:session:lost": (event) => letGo(event.hold, event),
      "holdfast:lease:granted": (event) =>
        hold(event.hold, "lease", [event.lease], { "holdfast.fence": event.fence }),
      "holdfast:lease:released": (event) => letGo(event.hold),
      "holdfast:lease:lost": (event) => letGo(event.hold, event),
    }),
  ];
  return () => {
    for (const end of ends) end();
    for (const span of [...running.values(), ...holding.values()]) span.end();
    running.clear();
    holding.clear();
  };
}

/** The code, which says what happened; never the message, which may say to whom. */
function typeOf(error: unknown): string {
  if (!isError(error)) return typeof error;
  const [code, name] = [read(error, "code"), read(error, "name")];
  if (typeof code === "string" && code !== "") return code;
  return typeof name === "string" && name !== "" ? name : "Error";
}

function endOf(error: unknown): string {
  const code = !isOpaque(error) && error instanceof HoldfastError ? error.code : undefined;
  if (code === "HF_COMMIT_UNKNOWN") return "unknown";
  if (code === "HF_LOCK_NOT_AVAILABLE") return "busy";
  return code === "HF_LOCK_TIMEOUT" ? "timeout" : "rollback";
}

function metrics(meter: MeterLike, options: MeasureOptions): () => void {
  const adding = new Map<Measure, Adding>();
  const recording = new Map<Measure, Recording>();
  for (const measure of allMeasures) {
    const { name, kind, help: description, buckets = [] } = measure;
    if (kind === "counter") adding.set(measure, meter.createCounter(name, { description }));
    if (kind === "updown") adding.set(measure, meter.createUpDownCounter(name, { description }));
    if (kind === "histogram") {
      const advice = { explicitBucketBoundaries: [...buckets] };
      recording.set(measure, meter.createHistogram(name, { description, unit: "s", advice }));
    }
  }
  const book: MeasureBook = {
    add: (measure, value, labels) => adding.get(measure)?.add(value, labels),
    record: (measure, seconds, labels) => recording.get(measure)?.record(seconds, labels),
  };
  const end = keep(book, options);
  const { queues = [] } = options;
  if (queues.length === 0) return end;
  const { name, help: description } = measures.depth;
  const gauge = meter.createObservableGauge(name, { description });
  const observe: Observe = async (result) => {
    for (const { value, labels } of await depths(queues, book)) result.observe(value, labels);
  };
  gauge.addCallback(observe);
  return () => {
    end();
    gauge.removeCallback(observe);
  };
}
