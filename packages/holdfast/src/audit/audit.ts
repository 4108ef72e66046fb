/** Changes that people make by hand leave a trace: `audited(hf, { action, target, actor }, work)`. */
import { placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { storeOf } from "../transaction/instance.ts";
import { UsageError, message } from "../seam/errors.ts";
import { checkJson, checkRows, checkText, checkWhole, optionalText } from "../input/values.ts";
import { checkNames } from "../input/options.ts";
import { type InstanceContext, contextOf } from "../transaction/scope.ts";
import type { Audits, LineEnd, WrittenLine } from "./store.ts";

export interface Audit {
  /** What is done, e.g. "quota.grant". */
  readonly action: string;
  /** To what, e.g. "quota:uploads:ada". */
  readonly target: string;
  /** By whom. */
  readonly actor: string;
  /** What else is to be known, as JSON has it. It is stored as it is: no passwords, no tokens. */
  readonly details?: Readonly<Record<string, unknown>> | undefined;
  /** Inside a transaction's body: apart from it. The line is there also if that is rolled back. */
  readonly separate?: boolean;
}

export interface AuditLine {
  readonly id: number;
  /** When it was begun, by the database's clock. */
  readonly at: Date;
  readonly actor: string;
  readonly action: string;
  readonly target: string;
  readonly details: unknown;
  /** `begun`: it is under way, or its process died, and what became of it is not known. */
  readonly outcome: "begun" | "done" | "failed";
  /** What the work returned. */
  readonly result: unknown;
  readonly error: string | undefined;
  readonly endedAt: Date | undefined;
}

const auditNames = new Set(["action", "target", "actor", "details", "separate"]);
const trailNames = new Set(["limit", "before", "target"]);
/** Index entries have their limits. */
const longest = { actor: 1000, action: 200, target: 2000 };
/** Of what the work returned: a line is for people to read. */
const longestResult = 100_000;
const longestError = 4000;

function auditsOf(context: InstanceContext<unknown, Connection>): Audits<Connection> {
  return storeOf(context, "audit", "audit");
}

/**
 * Writes a line that says what is to be done, in a transaction of its own, then does it, then writes what became of it.
 * A process that dies meanwhile leaves a line that was begun and not ended. If the first line cannot be written, nothing
 * is done. The work is given the id of its line; what it returns is stored as JSON. Inside a transaction of the same
 * instance the line is part of that, as the work is, unless it is to be `separate`: if it is rolled back, there is neither.
 */
export async function audited<T>(hf: object, what: Audit, work: (line: number) => Promise<T>): Promise<T> {
  const context = contextOf(hf, "audited");
  checkNames("audited", what, auditNames);
  for (const [name, most] of Object.entries(longest)) {
    checkText("audited", name, what[name as keyof typeof longest], { most });
  }
  if (typeof work !== "function") throw new UsageError("audited: the work must be a function");
  const place = placeOf(context, what.separate === undefined ? {} : { separate: what.separate }, "audited");
  if (what.separate && context.database.traits.single && context.current.getStore())
    throw new UsageError(
      "audited: this client has one connection, and it is in a transaction: a line apart from it would wait for its end. Call it outside",
    );

  const { actor, action, target, details } = what;
  const kept = details === undefined ? undefined : checkJson("audited", "details", details);
  const line = { actor, action, target, details: kept };
  const about = { names: ["audit"] };
  // Not again after an answer was lost: it may have been written, and a line that nobody ends would stay.
  const id = await send(context, place, { ...about, once: true }, async (connection, how) =>
    auditsOf(context).begin(connection, line, how),
  );
  const end = async (came: LineEnd) => {
    try {
      await send(context, place, about, async (connection, how) =>
        auditsOf(context).end(connection, id, came, how),
      );
    } catch (error) {
      // In a transaction that has failed: the line goes with it.
      if (place.scope) return;
      // What was done is done: the caller is told of that, and not of this.
      process.emitWarning(
        `Line ${id} of the audit stays "begun", for its end could not be written: ${message(error)}`,
        "HoldfastWarning",
      );
    }
  };
  let value: T;
  try {
    value = await work(id);
  } catch (error) {
    const text = message(error).replaceAll("\0", "\ufffd").toWellFormed().slice(0, longestError);
    await end({ outcome: "failed", result: undefined, error: text });
    throw error;
  }
  await end({ outcome: "done", result: resultOf(value), error: undefined });
  return value;
}

/** What was done, the newest first; `before`: the id of the last line of the page before. */
export async function trail(
  hf: object,
  options: { readonly limit?: number; readonly before?: number; readonly target?: string } = {},
): Promise<readonly AuditLine[]> {
  const context = contextOf(hf, "trail");
  checkNames("trail", options, trailNames);
  const { limit = 50, before, target } = options;
  checkRows("trail", "limit", limit, 10_000);
  if (before !== undefined) checkWhole("trail", "before", before);
  optionalText("trail", "target", target);

  const lines = await send(
    context,
    placeOf(context, undefined, "trail"),
    { names: ["audit"] },
    async (connection) => auditsOf(context).list(connection, { before, target, most: limit }),
  );
  return lines.map(shown);
}

function shown({ at, ended, ...line }: WrittenLine): AuditLine {
  return { ...line, at: new Date(at), endedAt: ended === undefined ? undefined : new Date(ended) };
}

function json(value: unknown, name: string): string {
  const text = JSON.stringify(value, (_, part: unknown) =>
    typeof part === "bigint"
      ? part.toString()
      : typeof part === "string"
        ? part.replaceAll("\0", "\ufffd").toWellFormed()
        : part,
  ) as string | undefined;
  if (text === undefined) throw new UsageError(`audited: ${name} must be something that JSON can hold`);
  return text;
}

function resultOf(value: unknown): string | undefined {
  if (value === undefined) return undefined;
  try {
    const text = json(value, "result");
    return text.length > longestResult ? json({ leftOut: `${text.length} characters` }, "result") : text;
  } catch {
    // It was done, whatever it returned.
    return undefined;
  }
}
