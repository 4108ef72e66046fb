export interface StartedServer {
  url: string;
  stop: () => Promise<void>;
}
