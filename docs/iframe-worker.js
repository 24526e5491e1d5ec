// For the search of a site that is opened from a folder. There a browser starts no Worker, so this
// class takes its place: it runs the worker's script in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script src="${new URL(url, location)}"></script>`;
      const loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      document.documentElement.append(this.frame);
      this.scope = loaded.then(() => {
        const scope = this.frame.contentWindow;
        scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        return scope;
      });
    }

    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
