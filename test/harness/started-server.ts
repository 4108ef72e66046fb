export interface StartedServer {
  url: string;
  stop: () => Promise<void>;
}

export interface StartedCluster {
  /** The address of each node's maintenance database. */
  readonly urls: readonly string[];
  readonly stop: () => Promise<void>;
}
