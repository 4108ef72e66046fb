import type { Open } from "../../seam/database.ts";

/** `value` is an SQL expression. Local: until the end of the transaction. */
export function setLocal(name: string, value: string): string {
  return `pg_catalog.set_config('${name}', ${value}, true)`;
}

/** What opens a label. Nobody's own application name is likely to hold it. */
const mark = " [hf:";

/** The application's own name, without a label that an outer call may have added. */
export const application = `pg_catalog.split_part(pg_catalog.current_setting('application_name'), '${mark}', 1)`;

/** For a literal: only what cannot end it, whatever the server's quoting settings are. */
function literal(text: string): string {
  return text.replace(/[^\x20-\x7e]|['\\]/gu, "?");
}

/** " [hf:image-upload:42]", to follow the application's name. The server keeps 63 bytes of the whole. */
export function label(names: readonly string[]): string {
  const [first, ...others] = names;
  if (first === undefined) return "";
  return `${mark}${literal(first)}${others.length > 0 ? ` +${others.length}` : ""}]`;
}

/** "api" becomes "api [hf:image-upload:42]" until the transaction ends. */
export function labelled(names: readonly string[], base: string): string[] {
  return names.length === 0
    ? []
    : [setLocal("application_name", `${base} OPERATOR(pg_catalog.||) '${label(names)}'`)];
}

/**
 * Keeps a stricter setting that is there already: settings read like '30s', which is an interval's spelling too.
 * Set to 0 first, as a timer that runs already is not set anew: a limit of 20 s would stay 20 s.
 */
function bounded(name: string, ms: number): string[] {
  const before = "pg_catalog.current_setting('holdfast.limit')";
  const asMs = `(extract(epoch FROM ${before}::interval) OPERATOR(pg_catalog.*) 1000)`;
  return [
    setLocal("holdfast.limit", `pg_catalog.current_setting('${name}')`),
    setLocal(name, "'0'"),
    setLocal(
      name,
      `CASE WHEN ${asMs} OPERATOR(pg_catalog.>=) 1 AND ${asMs} OPERATOR(pg_catalog.<=) ${ms} THEN ${before} ELSE '${ms}' END`,
    ),
  ];
}

/** A frozen client cannot end its transaction: only the server can. Before 17 two settings stand in for one. */
export function deadline({ deadlineMs, capabilities: { details } }: Open): string[] {
  const names = details?.transactionTimeout
    ? ["transaction_timeout"]
    : ["statement_timeout", "idle_in_transaction_session_timeout"];
  // Comparing costs 29 µs a setting, and on most servers there is nothing to compare with.
  return names.flatMap((name) =>
    details?.timeouts ? bounded(name, deadlineMs) : [setLocal(name, `'${deadlineMs}'`)],
  );
}
