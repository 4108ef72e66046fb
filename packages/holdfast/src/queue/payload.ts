/** Payloads, as the schema of their queue has them. */
import { PayloadError } from "./errors.ts";
import type { SchemaResult, StandardSchema } from "./types.ts";

export class Payloads<Input, Output> {
  readonly #queue: string;
  readonly #schema: StandardSchema<Input, Output> | undefined;

  constructor(queue: string, schema: StandardSchema<Input, Output> | undefined) {
    this.#queue = queue;
    this.#schema = schema;
  }

  /** There is something to check. */
  get hasSchema(): boolean {
    return this.#schema !== undefined;
  }

  /** Throws if it does not fit. */
  async check(payload: unknown): Promise<void> {
    const result = await this.#schema?.["~standard"].validate(payload);
    if (result) this.#accepted(result);
  }

  /** What the schema makes of it: a promise only if it answers later, since most answer at once. */
  read(payload: unknown): Output | Promise<Output> {
    if (!this.#schema) return payload as Output;
    const result = this.#schema["~standard"].validate(payload);
    return "then" in result
      ? Promise.resolve(result).then((later) => this.#accepted(later))
      : this.#accepted(result);
  }

  #accepted(result: SchemaResult<Output>): Output {
    if (result.issues) throw this.#unfit(result.issues);
    return result.value;
  }

  #unfit(issues: Extract<SchemaResult<Output>, { issues: readonly unknown[] }>["issues"]): PayloadError {
    return new PayloadError(
      this.#queue,
      issues.map(({ message, path }) => ({
        message,
        ...(path && {
          path: path.map((part) =>
            typeof part === "object" && part !== null && "key" in part ? part.key : part,
          ),
        }),
      })),
    );
  }
}
