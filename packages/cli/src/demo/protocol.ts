export const contestants = ["naive", "serializable", "holdfast"] as const;
export type Contestant = (typeof contestants)[number];

/** What a worker needs to know before it can take orders. */
export interface Setting {
  readonly url: string;
  /** The table, qualified and quoted. */
  readonly table: string;
  readonly user: number;
  readonly limit: number;
  readonly callers: number;
}

export type ToWorker =
  | { readonly kind: "set-up"; readonly setting: Setting }
  | { readonly kind: "run"; readonly contestant: Contestant; readonly calls: number };

/** How calls ended, as the callers saw it. */
export interface Tally {
  granted: number;
  refused: number;
  /** By SQLSTATE, or the error's own code or name. */
  failed: Record<string, number>;
}

export type FromWorker =
  | { readonly kind: "ready" }
  | { readonly kind: "progress"; readonly finished: number }
  | { readonly kind: "done"; readonly tally: Tally; readonly latenciesMs: readonly number[] }
  | { readonly kind: "error"; readonly message: string };
