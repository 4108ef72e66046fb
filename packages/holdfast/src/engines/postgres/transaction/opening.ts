/** What opens a transaction: BEGIN, and the statement that sets its deadline, takes its locks and asks for its id. */
import { hash } from "node:crypto";
import type { Open, Step } from "../../../seam/database.ts";
import type { LockRequest } from "../../../seam/key.ts";
import { isolationNow, standby, taking } from "../locks/index.ts";
import { xid, xidOn } from "./outcome.ts";
import { deadline, label, labelled, setLocal } from "../settings.ts";
import * as protection from "../../../seam/protections.ts";

const isolationSql = {
  "read uncommitted": "READ UNCOMMITTED",
  "read committed": "READ COMMITTED",
  "repeatable read": "REPEATABLE READ",
  serializable: "SERIALIZABLE",
} as const;

export function beginText({ isolation, readOnly }: Open): string {
  return `BEGIN ISOLATION LEVEL ${isolationSql[isolation]}${readOnly ? " READ ONLY" : ""}`;
}

const beginSteps = new Map<string, Step>();

/** The same, kept by the session. */
export function beginStep(open: Open): Step {
  const text = beginText(open);
  let step = beginSteps.get(text);
  if (!step) beginSteps.set(text, (step = { text, values: [], kept: true, columns: [] }));
  return step;
}

/** `checks`: columns that are computed before the locks are taken. */
export function opening(open: Open, locks: readonly LockRequest[], checks: readonly string[]): string {
  const { begun, readOnly, wait, names } = open;
  const columns = [
    ...labelled(names, "pg_catalog.current_setting('application_name')"),
    ...deadline(open),
    isolationNow,
    ...checks,
    ...(begun && readOnly ? [setLocal("transaction_read_only", "'on'")] : []),
    ...taking(locks, wait, begun),
    readOnly ? standby : xidOn(open.capabilities),
  ];
  return `SELECT ${columns.join(", ")}`;
}

/** Schemas times maps. */
const mostChecked = 1000;

/**
 * The most common transactions: without a lock, or with one key, taken exclusively. As a prepared statement of the
 * session where that can be had, since parsing and planning the text is most of what it costs (server CPU: 140 µs as
 * text, 86 µs prepared). In one column: a client that decodes seven spends another 20 µs. By the protocol's own means where the
 * client has them (`step`), else by SQL's PREPARE and EXECUTE.
 */
class Prepared {
  readonly name: string;
  readonly definition: string;
  readonly #types: string;
  readonly #steps: readonly string[];
  readonly #text: string;
  readonly #columns: readonly string[];
  readonly #checked = new Map<string, Prepared>();
  readonly #on = new WeakSet<object>();

  constructor(types: string, steps: readonly string[], checks: readonly string[] = []) {
    this.#types = types;
    this.#steps = steps;
    this.#text = `SELECT ${[...checks, `pg_catalog.concat(${steps.join(", ")}) AS done`, isolationNow, xid].join(", ")}`;
    this.#columns = [...checks.map(() => "map"), "done", "isolation", "xid"];
    // Named for its text: another version's statement, left behind on a pooled session, must not be mistaken for it.
    this.name = `holdfast_${hash("sha256", this.#text, "hex").slice(0, 12)}`;
    this.definition = `PREPARE ${this.name}(${types}) AS ${this.#text}`;
  }

  /** The same, with what is checked first: it changes with the map of several databases, which is seldom. */
  checking(checks: readonly string[]): Prepared {
    if (checks.length === 0) return this;
    const named = checks.join(", ");
    let found = this.#checked.get(named);
    if (!found) {
      if (this.#checked.size > mostChecked) this.#checked.clear();
      this.#checked.set(named, (found = new Prepared(this.#types, this.#steps, checks)));
    }
    return found;
  }

  isOn(session: object): boolean {
    return this.#on.has(session);
  }

  markOn(session: object): void {
    this.#on.add(session);
  }

  /** With the values in it. */
  inline(values: readonly string[]): string {
    return this.#text.replaceAll(/\$(\d)/g, (_, n: string) => literal(values[Number(n) - 1] ?? ""));
  }

  execute(values: readonly string[]): string {
    return `EXECUTE ${this.name}(${values.map(literal).join(", ")})`;
  }

  step(values: readonly string[]): Step {
    return { text: this.#text, values, kept: true, columns: this.#columns };
  }
}

/** Digits, and labels in which nothing is left that could end it. */
const literal = (value: string) => `'${value}'`;

const timeout = (value: string) =>
  protection.serverDeadline ? setLocal("transaction_timeout", value) : value;

const bare = new Prepared("pg_catalog.text", [timeout("$1::pg_catalog.text")]);

const oneKey = new Prepared("bigint, pg_catalog.text, pg_catalog.text, pg_catalog.text", [
  setLocal(
    "application_name",
    "pg_catalog.current_setting('application_name') OPERATOR(pg_catalog.||) $4::pg_catalog.text",
  ),
  timeout("$3::pg_catalog.text"),
  setLocal("holdfast.patience", "pg_catalog.current_setting('lock_timeout')"),
  setLocal("lock_timeout", "$2::pg_catalog.text"),
  protection.lockBeforeRead ? "pg_catalog.pg_advisory_xact_lock($1::bigint)" : "$1::bigint",
  setLocal("lock_timeout", "pg_catalog.current_setting('holdfast.patience')"),
]);

/** One of these, with its values, in each of the forms that it can be sent in. */
export interface Usual {
  readonly prepared: Prepared;
  text(): string;
  execute(): string;
  step(): Step;
}

export function usualOpening(open: Open, checks: readonly string[]): Usual | undefined {
  const { locks, wait, readOnly, lockFirst, names, deadlineMs, capabilities } = open;
  const { details } = capabilities;
  if (readOnly || lockFirst || !details?.transactionTimeout || details.timeouts) return undefined;
  const [request, ...others] = locks;
  if (!request) return usual(bare.checking(checks), [String(deadlineMs)]);
  if (others.length > 0 || request.mode === "shared" || wait === "nowait") return undefined;
  const { form } = request.key;
  const id = form.kind === "name" ? form.hash : form.kind === "bigint" ? form.value : undefined;
  if (id === undefined) return undefined;
  return usual(oneKey.checking(checks), [String(id), String(wait), String(deadlineMs), label(names)]);
}

function usual(prepared: Prepared, values: readonly string[]): Usual {
  return {
    prepared,
    text: () => prepared.inline(values),
    execute: () => prepared.execute(values),
    step: () => prepared.step(values),
  };
}
