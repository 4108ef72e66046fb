/** What a thing would do if one operation came after the other. */
import { type Operation, textOf } from "./operation.ts";

/** Some of the operations that have no explanation, whatever the others did. */
export interface Refutation {
  readonly operations: readonly Operation[];
  /** When it came back, no explanation was left. */
  readonly culprit: Operation;
}

export type ModelDecided = "ok" | Refutation;

/**
 * A model is data. `step` is all that it takes; `anyProcess`, `effect`, `mayWait` and `decide` only make the check faster, and must be true
 * whatever the state is.
 */
export interface Model<State, Input = unknown, Output = unknown> {
  readonly name: string;
  /** `operations`: all of that key, for a model that wants to know what will come. */
  initial(key: string, operations: readonly Operation<Input, Output>[]): State;
  /**
   * The states that there may be after the operation; none, if it cannot have come out like this. Of one whose
   * `outcome` is "unknown", all states that it may have led to: that it may have done nothing need not be said.
   */
  step(state: State, operation: Operation<Input, Output>): readonly State[];
  /** Equal for states that are the same. Default: as JSON with sorted keys. */
  key?(state: State): string;
  /** For people. Default: as `key`. */
  show?(state: State): string;
  /** It does not matter which process calls: equal calls are alike. */
  readonly anyProcess?: boolean;
  /** "read": it never changes the state. "write": it is always possible, and what it leaves depends on it alone. */
  effect?(operation: Operation<Input, Output>): "read" | "write" | undefined;
  /** Wherever `first` directly before `second` is possible, directly after it is too, and ends the same. */
  mayWait?(first: Operation<Input, Output>, second: Operation<Input, Output>): boolean;
  /** A faster way than to try orders; undefined where it cannot tell. `time.tick()`, called often, ends it in time, and so does `check`. */
  decide?(
    operations: readonly Operation<Input, Output>[],
    time: { tick(): void; check(): void },
  ): ModelDecided | undefined;
}

export interface Specification<State, Input, Output> {
  readonly name: string;
  initial(key: string): State;
  /** The next state, and what the call returns. */
  apply(state: State, call: string, input: Input): readonly [state: State, output: Output];
  show?(state: State): string;
}

/** A model of something whose every call has one result: tell what that is, as you would write it for one caller. */
export function sequential<State, Input, Output>(
  specification: Specification<State, Input, Output>,
): Model<State, Input, Output> {
  const { name, show } = specification;
  return {
    name,
    anyProcess: true,
    initial: (key) => specification.initial(key),
    step(state, { call, input, outcome, output }) {
      const [next, expected] = specification.apply(state, call, input);
      return outcome === "unknown" || textOf(expected) === textOf(output) ? [next] : [];
    },
    ...(show ? { show: (state: State) => show.call(specification, state) } : {}),
  };
}
