import type { DriverError, Failure } from "../../seam/database.ts";
import { SchemaMissingError, message } from "../../seam/errors.ts";

/** Its errors have no codes: each message begins with the kind of the error, which is all there is to go by. */
const messages: readonly (readonly [RegExp, Failure])[] = [
  [/^TransactionContext Error: Current transaction is aborted/, "aborted"],
  [/^TransactionContext Error: .*read-only/, "read-only"],
  [/^Invalid Input Error: Cannot execute .*read-only/, "read-only"],
  [/^TransactionContext Error: .*no transaction is active/, "not-in-transaction"],
  [/^TransactionContext Error: Failed to commit: .*(?:PRIMARY KEY|UNIQUE|duplicate key)/, "unique"],
  [/^TransactionContext Error: (?:Conflict on|Transaction conflict|Catalog write-write)/, "serialization"],
  [/^TransactionContext Error: Failed to commit: .*[Cc]onflict/, "serialization"],
  [/^Constraint Error: (?:Duplicate key|PRIMARY KEY or UNIQUE)/, "unique"],
  [/^Constraint Error: Violates foreign key/, "foreign-key"],
  [/^Constraint Error: CHECK/, "check"],
  [/^INTERRUPT Error/, "canceled"],
  [/^Permission Error/, "denied"],
  [/^Out of Memory Error/, "full"],
  [/^(?:IO Error|TransactionContext Error): [^]*No space left on device/, "full"],
  [
    /^(?:IO Error: |TransactionContext Error: Failed to commit: )(?:Could not (?:read|write|sync|truncate)|Corrupt)/,
    "storage",
  ],
];

/** Somebody else's transaction has what the patterns are written under. */
export class PatternsBusy extends Error {
  constructor() {
    super(
      "the patterns of this database are being written in another transaction, and that took longer than the wait",
    );
  }
}

/** Nobody in the circle would go on before the first of them gives up. */
export class WaitInCircle extends Error {
  constructor(name: string) {
    super(`who holds ${name} waits for a lock that this transaction holds`);
  }
}

export function classify(error: DriverError): Failure | undefined {
  if (error instanceof PatternsBusy) return "lock-timeout";
  if (error instanceof WaitInCircle) return "deadlock";
  const text = error.message;
  if (typeof text !== "string") return undefined;
  const own = text.replace(/^Failed to extract statements: /, "");
  return messages.find(([pattern]) => pattern.test(own))?.[1];
}

export function isConflict(error: unknown): boolean {
  return classify(error as DriverError) === "serialization";
}

const missingTable = /^Catalog Error: Table with name (\w+) does not exist/;

export const isMissingTable = (error: unknown): boolean => missingTable.test(message(error));

/** Work on tables of ours. */
export async function explaining<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    const name = missingTable.exec(message(error))?.[1];
    throw name === undefined ? error : new SchemaMissingError(`The table ${name}`, error);
  }
}
