/** What a check is, and what it finds. */
import { describe } from "../describe.ts";
import { serversOwn } from "../failure.ts";
import { remedyOfNoConnection } from "../no-connection.ts";
import { NoAnswer } from "../within.ts";

/** The worst first. */
export const severities = ["error", "warning", "hint"] as const;

export type Severity = (typeof severities)[number];

export interface Finding {
  readonly severity: Severity;
  /** With the names: the table, the session, the setting and its value. */
  readonly what: string;
  /** Why it matters for code that checks, then writes. */
  readonly why: string;
  /** Statements or lines of a configuration file, ready to be used. */
  readonly fix: string;
  /** Nothing was found, since it could not be looked at. */
  readonly blind?: true;
}

export interface Check<P> {
  readonly id: string;
  /** What it looks for. */
  readonly title: string;
  run(patient: P): Promise<readonly Finding[]>;
}

/** For lack of a right, or because the server cannot tell. */
export class CouldNotLook extends Error {
  readonly fix: string;

  constructor(reason: string, fix: string) {
    super(reason);
    this.fix = fix;
  }
}

export function blind(reason: string, fix: string): Finding {
  return {
    severity: "hint",
    what: `could not look: ${reason}`,
    why: "Whether all is well here is not known.",
    fix,
    blind: true,
  };
}

/** Of a check that takes more connections than are left. */
export function noConnection(error: unknown): Finding | undefined {
  const remedy = error instanceof NoAnswer ? undefined : remedyOfNoConnection(error);
  return remedy === undefined
    ? undefined
    : blind(`it takes another connection, and there is none: ${describe(error)}`, remedy);
}

/** Of one kind, which differ in what was found and how to mend it. */
export function findings(
  severity: Severity,
  why: string,
  rows: readonly { readonly what: string; readonly fix: string }[],
): Finding[] {
  return rows.map(({ what, fix }) => ({ severity, what, why, fix }));
}

/** There is no such table, schema or column: of Holdfast's own, which need not be there, or not as this version has them. */
function isAbsent(error: unknown): boolean {
  const { code, errno, message } = serversOwn(error) as {
    code?: unknown;
    errno?: unknown;
    message?: unknown;
  };
  return (
    ["42P01", "3F000", "42703"].includes(String(code)) ||
    errno === 1146 ||
    errno === 1054 ||
    /^no such (?:table|column)/.test(String(message))
  );
}

export async function orAbsent<T>(ask: () => Promise<readonly T[]>): Promise<readonly T[]> {
  try {
    return await ask();
  } catch (error) {
    if (isAbsent(error)) return [];
    throw error;
  }
}

/** A statement of somebody's: enough to recognize it by. */
export function short(query: unknown, most = 60): string {
  const flat = String(query ?? "")
    .replaceAll(/\s+/g, " ")
    .trim();
  return flat.length <= most ? flat : `${flat.slice(0, most - 1)}…`;
}

/** Of a session that is at work. What is lost if it is ended; undefined: as far as is known no more than a transaction. */
export function lostWith(application: string, statement: string): string | undefined {
  if (/^pg_(?:dump|dumpall|restore)\b/.test(application))
    return "It copies the whole database in one transaction: if it is ended, there is no backup, or half of what was to be restored.";
  if (/^\s*(?:create\s+(?:unique\s+)?index|reindex\b.*?)\s+concurrently\b/is.test(statement))
    return "It builds an index beside everybody's work: if it is ended, an invalid index is left, which every write pays for and no query uses.";
  return undefined;
}

/** Columns that by their name promise that something happens once. */
export const promising =
  /^(?:idempotency|idempotence|idempotent|dedup|dedupe|deduplication)_?(?:key|id|token|hash)?$/i;
