// Search where the site is opened as files: browsers start no workers there, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      // What a worker posts goes to the page that made it; what a frame posts to itself would stay there.
      const relay = 'self.postMessage = data => parent.postMessage(data, "*")';
      this.frame.srcdoc = `<script>${relay}<\/script><script src="${url}"><\/script>`;
      this.loaded = new Promise((done) => this.frame.addEventListener("load", done));
      this.relayed = (event) => {
        if (event.source === this.frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        }
      };
      addEventListener("message", this.relayed);
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      removeEventListener("message", this.relayed);
      this.frame.remove();
    }
  };
}
