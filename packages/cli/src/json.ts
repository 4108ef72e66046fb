/** `--json`: one object on stdout, whatever happens. */

/** What could not be done, and why. */
export interface JsonError {
  readonly message: string;
  readonly exitCode: number;
  /** As docs/errors.md lists them, if it was one of these. */
  readonly code?: string | undefined;
}

/** What a terminal may take for an order, or shows nothing of, and JSON does not escape by itself. */
const unseen = /[\x7f-\x9f\p{Cf}\p{Zl}\p{Zp}\p{Co}]/gu;
const escaped = (text: string): string =>
  text
    .split("")
    .map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .join("");

let printed = false;
let failed: JsonError | undefined;

/** Before a verb is run. */
export function beginJson(): void {
  printed = false;
  failed = undefined;
}

/** An object and not a list, so that it can come to have more in it. */
export function printJson<T extends object>(
  value: T extends readonly unknown[] ? never : T,
  write: (text: string) => unknown = (text) => process.stdout.write(text),
): void {
  printed = true;
  const document = failed ? { ...value, error: failed } : value;
  const text = JSON.stringify(document, undefined, process.stdout.isTTY ? 2 : undefined);
  write(`${text.replace(unseen, escaped)}\n`);
}

/** A part of it could not be done: told with the rest. */
export function keepJsonError(error: JsonError): void {
  failed = error;
}

/** Unless there has been a document already. Without an error of its own: the one that was kept. */
export function printJsonError(error = failed, write?: (text: string) => unknown): void {
  if (!wantsJson() || printed || !error) return;
  failed = error;
  printJson({}, write);
}

/** Also where what was typed could not be understood. What `exec` runs has options of its own. */
function wantsJson(): boolean {
  const [verb, ...words] = process.argv.slice(2);
  const end = words.indexOf("--");
  return verb !== "exec" && words.slice(0, end < 0 ? undefined : end).includes("--json");
}
